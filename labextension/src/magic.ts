// YAML in cells that start with %%etrain: CodeMirror gets another language for as long as they do.
import { LanguageSupport, StreamLanguage, StreamParser, StringStream } from '@codemirror/language';
import { yaml } from '@codemirror/legacy-modes/mode/yaml';
import { Compartment, EditorState, Extension, Prec } from '@codemirror/state';
import { ViewPlugin } from '@codemirror/view';

const MAGIC = /^\s*%%etrain\b/;

interface IState {
  /** Whether the line of the magic itself is being read. */
  isHead: boolean;
  numWords: number;
  body: unknown;
}

const body = yaml as StreamParser<unknown>;

const parser: StreamParser<IState> = {
  name: 'etrain-yaml',
  startState: unit => ({ isHead: true, numWords: 0, body: body.startState?.(unit) }),
  copyState: state => ({
    ...state,
    body: body.copyState ? body.copyState(state.body) : { ...(state.body as object) }
  }),
  token: (stream, state) => (state.isHead ? headToken(stream, state) : bodyToken(stream, state)),
  blankLine: (state, unit) => {
    state.isHead = false;
    body.blankLine?.(state.body, unit);
  },
  languageData: { commentTokens: { line: '#' }, indentOnInput: /^\s*[\]}]$/ }
};

/**
 * JupyterLab completes by every token of the cell that begins like the one at the cursor, and by all of them where
 * there is none. So all text is a token, blanks are not the beginning of one, and brackets are no part of `: `.
 */
function bodyToken(stream: StringStream, state: IState): string {
  if (!stream.sol() && stream.eatSpace()) {
    return 'content';
  }
  const style = body.token(stream, state.body) ?? 'content';
  if (style !== 'meta' || !/^[[\]{}]$/.test(stream.current())) {
    return style;
  }
  // The mode looks for a key at the beginning of a line and after a comma; one begins here, too.
  (state.body as { pair: boolean }).pair = false;
  return 'bracket';
}

/** `%%etrain distributed --name digits  # comment`: magic, sub-command, flags, their values. */
function headToken(stream: StringStream, state: IState): string | null {
  const style = headStyle(stream, state);
  if (stream.eol()) {
    state.isHead = false;
  }
  return style;
}

function headStyle(stream: StringStream, state: IState): string | null {
  if (stream.eatSpace()) {
    return null;
  }
  if (stream.match(/^%%etrain\b/)) {
    return 'meta';
  }
  if (stream.match(/^#.*/)) {
    return 'comment';
  }
  const isFlag = !!stream.match(/^--?[\w-]+/);
  if (!isFlag) {
    stream.match(/^\S+/);
  }
  return isFlag ? 'attributeName' : state.numWords++ === 0 ? 'keyword' : 'string';
}

const language = new LanguageSupport(StreamLanguage.define(parser));

/**
 * Switches the language of one editor by its first line, if that is wanted; `text` is what the cell holds at first.
 * `onChange` hears when what is wanted changes, and returns how to stop that.
 */
export function magicLanguage(
  text: string,
  isWanted: () => boolean,
  onChange: (hear: () => void) => () => void
): Extension {
  const slot = new Compartment();
  const choose = (isOn: boolean): Extension => (isOn ? Prec.highest(language) : []);
  let isOn = isWanted() && MAGIC.test(text);
  return [
    slot.of(choose(isOn)),
    EditorState.transactionExtender.of(transaction => {
      const isNext = isWanted() && MAGIC.test(transaction.newDoc.sliceString(0, 64));
      if (isNext === isOn) {
        return null;
      }
      isOn = isNext;
      return { effects: slot.reconfigure(choose(isOn)) };
    }),
    ViewPlugin.define(view => ({ destroy: onChange(() => view.dispatch({})) }))
  ];
}

// Highlight cells that start with %%etrain as YAML, by changing CodeMirror's language.
import { LanguageSupport, StreamLanguage, StreamParser, StringStream } from '@codemirror/language';
import { yaml } from '@codemirror/legacy-modes/mode/yaml';
import { Compartment, EditorState, Extension, Prec } from '@codemirror/state';
import { ViewPlugin } from '@codemirror/view';

const MAGIC = /^\s*%%etrain\b/;

interface IState {
  /** Whether the parser is in the first line, that of the magic. */
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
 * Return the style of the next token of the body.
 *
 * JupyterLab offers as completions all tokens of the cell that start like the token at the cursor,
 * or all tokens if there is none. So all text must be a token, no token may start with blanks, and
 * brackets must not be part of `: `.
 */
function bodyToken(stream: StringStream, state: IState): string {
  if (!stream.sol() && stream.eatSpace()) {
    return 'content';
  }
  const style = body.token(stream, state.body) ?? 'content';
  if (style !== 'meta' || !/^[[\]{}]$/.test(stream.current())) {
    return style;
  }
  // The YAML mode expects a key only at the start of a line and after a comma. A key may start
  // here, too.
  (state.body as { pair: boolean }).pair = false;
  return 'bracket';
}

/**
 * Return the style of the next token of the first line, such as `%%etrain distributed --name digits
 * # comment`.
 */
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
 * Return an extension that sets the language of one editor by its first line.
 *
 * `text` is the initial text of the cell. `onChange` registers a listener for changes of
 * `isEnabled` and returns a function that removes it.
 */
export function magicLanguage(
  text: string,
  isEnabled: () => boolean,
  onChange: (listener: () => void) => () => void
): Extension {
  const slot = new Compartment();
  const choose = (isOn: boolean): Extension => (isOn ? Prec.highest(language) : []);
  let isOn = isEnabled() && MAGIC.test(text);
  return [
    slot.of(choose(isOn)),
    EditorState.transactionExtender.of(transaction => {
      const isNext = isEnabled() && MAGIC.test(transaction.newDoc.sliceString(0, 64));
      if (isNext === isOn) {
        return null;
      }
      isOn = isNext;
      return { effects: slot.reconfigure(choose(isOn)) };
    }),
    ViewPlugin.define(view => ({ destroy: onChange(() => view.dispatch({})) }))
  ];
}

// Small DOM helpers. They insert text, never markup.

export function make<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  className = ''
): HTMLElementTagNameMap[K] {
  const element = document.createElement(tag);
  if (className) {
    element.className = className;
  }
  return element;
}

/** Return the first descendant that matches `selector`; it must exist. */
export function find(parent: Element, selector: string): HTMLElement {
  const found = parent.querySelector<HTMLElement>(selector);
  if (!found) {
    throw new Error(`No element matches ${selector}.`);
  }
  return found;
}

/** Return a box of fixed height that can be scrolled with the keyboard. */
export function scrolling(className: string, label: string, content: HTMLElement): HTMLElement {
  const box = make('div', `etrain-scroll ${className}`);
  box.tabIndex = 0;
  box.setAttribute('role', 'region');
  box.setAttribute('aria-label', label);
  box.append(content);
  return box;
}

/** Set a text if it has changed. An unchanged text keeps its selection and its hover state. */
export function setText(element: HTMLElement, text: string): void {
  if (element.textContent !== text) {
    element.textContent = text;
  }
}

/** Create, update, move and remove the children of `parent` to match `items`. Keys may repeat. */
export function reconcile<T>(
  parent: HTMLElement,
  items: T[],
  keyOf: (item: T) => string,
  create: (item: T) => HTMLElement,
  fill: (element: HTMLElement, item: T) => void
): void {
  const present = new Map(
    [...parent.children].map(child => [(child as HTMLElement).dataset.key, child as HTMLElement])
  );
  let place = parent.firstElementChild;
  const seen = new Map<string, number>();
  for (const item of items) {
    const times = seen.get(keyOf(item)) ?? 0;
    seen.set(keyOf(item), times + 1);
    const key = times ? `${keyOf(item)} (${times})` : keyOf(item);
    const element = present.get(key) ?? create(item);
    present.delete(key);
    element.dataset.key = key;
    fill(element, item);
    if (element === place) {
      place = place.nextElementSibling;
    } else {
      parent.insertBefore(element, place);
    }
  }
  present.forEach(element => element.remove());
}

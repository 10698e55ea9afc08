type Attributes = Record<string, string>;

/** An element with a class, attributes and children. Strings become text nodes: model text is never markup. */
export function h<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  className: string,
  attributes: Attributes = {},
  ...children: (Node | string)[]
): HTMLElementTagNameMap[K] {
  const element = document.createElement(tag);
  if (className) element.className = className;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** A button with a name for people who do not see it. */
export function button(text: string, label: string, onClick: () => void): HTMLButtonElement {
  const element = h("button", "llmk-button", { type: "button", "aria-label": label, title: label }, text);
  element.addEventListener("click", onClick);
  return element;
}

/** Writes text into a node only if it changed: untouched nodes cost no layout. */
export function setText(node: Node, text: string): void {
  if (node.textContent !== text) node.textContent = text;
}

import MarkdownIt from "markdown-it";
import { addMath } from "./math";

const markdown = new MarkdownIt({ html: false, linkify: false, breaks: false });
addMath(markdown);
const isRemote = (url: string) => /^([a-z][a-z0-9+.-]*:)?\/\//i.test(url);

// Images are never fetched: a remote one becomes a link, any other its description.
markdown.renderer.rules.image = (tokens, index) => {
  const token = tokens[index]!;
  const url = token.attrGet("src") ?? "";
  const label = markdown.utils.escapeHtml(token.content || url);
  if (!isRemote(url)) return label;
  return `<a href="${markdown.utils.escapeHtml(url)}" rel="noopener noreferrer nofollow" target="_blank">${label}</a>`;
};
markdown.renderer.rules.link_open = (tokens, index, options, _env, self) => {
  tokens[index]!.attrSet("rel", "noopener noreferrer nofollow");
  tokens[index]!.attrSet("target", "_blank");
  return self.renderToken(tokens, index, options);
};
markdown.validateLink = (url: string) => /^(https?:|mailto:|#)/i.test(url.trim());

/**
 * Fills `element` with the Markdown of `text`: CommonMark, tables and formulas, no HTML of the model's, nothing fetched.
 *
 * A bundle of its own (markdown.js): the kernel sends it when a reader first asks for Markdown.
 */
export function renderMarkdown(element: HTMLElement, text: string): void {
  element.innerHTML = markdown.render(text);
}

import type MarkdownIt from "markdown-it";
import temml from "temml";

const LONGEST = 3000; // characters of a formula
const OPTIONS = { throwOnError: true, trust: false, maxExpand: 500, maxSize: [20, 20] as [number, number] };

/** The end of a formula that begins at `start`, or -1. As pandoc has it: "$5 and $10" is no formula. */
function closing(source: string, start: number, mark: string): number {
  const end = source.indexOf(mark, start);
  if (end <= start || end - start > LONGEST) return -1;
  if (mark !== "$") return end;
  const inside = source[start] !== " " && source[end - 1] !== " " && source[end - 1] !== "\\";
  return inside && !/\d/.test(source[end + 1] ?? "") && !source.slice(start, end).includes("\n\n") ? end : -1;
}

/** Typesets $x$, $$x$$, \(x\) and \[x\] as MathML: nothing is fetched, and what is no formula stays as it is. */
export function addMath(markdown: MarkdownIt): void {
  const pairs: [open: string, close: string, display: boolean][] = [
    ["$$", "$$", true],
    ["$", "$", false],
    ["\\[", "\\]", true],
    ["\\(", "\\)", false],
  ];
  markdown.inline.ruler.before("escape", "math", (state, silent) => {
    for (const [open, close, display] of pairs) {
      if (!state.src.startsWith(open, state.pos)) continue;
      const start = state.pos + open.length;
      const end = closing(state.src, start, close);
      if (end < 0) continue;
      if (!silent) {
        const token = state.push("math", "math", 0);
        token.content = state.src.slice(start, end);
        token.markup = state.src.slice(state.pos, end + close.length);
        token.block = display;
      }
      state.pos = end + close.length;
      return true;
    }
    return false;
  });
  markdown.renderer.rules.math = (tokens, index) => {
    const { content, markup, block } = tokens[index]!;
    try {
      return temml.renderToString(content, { ...OPTIONS, displayMode: block });
    } catch {
      return markdown.utils.escapeHtml(markup);
    }
  };
}

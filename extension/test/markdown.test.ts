import { describe, expect, it } from "vitest";
import { renderMarkdown } from "../src/stream/markdown";

function rendered(text: string): HTMLElement {
  const element = document.createElement("div");
  renderMarkdown(element, text);
  return element;
}

describe("formulas", () => {
  it.each([
    ["so $x^2$ grows", "so  grows", 1],
    ["$$\\frac{a}{b}$$", "", 1],
    ["\\(a\\) and \\[b\\]", " and ", 2],
  ])("typesets %s", (text, left, count) => {
    const element = rendered(text);
    expect(element.querySelectorAll("math")).toHaveLength(count);
    for (const math of element.querySelectorAll("math")) math.remove();
    expect(element.textContent!.trim()).toBe(left.trim());
  });

  it.each(["it costs $5 and $10", "a $ b $ c", "only one $", "`$x$`", "$\\undefined{x}$", "$\\href{http://a.test}{x}$"])(
    "leaves %s alone",
    (text) => {
      const element = rendered(text);
      expect(element.querySelector("a, script, img")).toBeNull();
      expect(element.textContent!.trim()).toContain(text.replaceAll("`", "").slice(0, 4));
    },
  );

  it("cannot be made to carry HTML, or to grow without end", () => {
    const element = rendered("$\\text{<img src=x onerror=alert(1)>}$ $\\def\\a{\\a\\a}\\a$ $\\includegraphics{http://bait.invalid/x.png}$");
    expect(element.querySelector("img, script, a")).toBeNull();
  });
});

const NEAR = 24;
const grown = new Set<HTMLElement>();

/** Heights are read before any of them is scrolled: one layout for all rows of a frame, not one for each. */
function toTheEnd(): void {
  const elements = [...grown];
  grown.clear();
  const heights = elements.map((element) => element.scrollHeight);
  elements.forEach((element, index) => (element.scrollTop = heights[index]!));
}

/** Keeps a scrolling element at its end while text grows, unless the reader scrolled up. */
export class Follow {
  private following = true;

  constructor(private readonly element: HTMLElement) {
    element.addEventListener("scroll", this.onScroll, { passive: true });
  }

  /** Call after the content has grown. */
  grown(): void {
    if (!this.following) return;
    if (grown.size === 0) queueMicrotask(toTheEnd);
    grown.add(this.element);
  }

  dispose(): void {
    this.element.removeEventListener("scroll", this.onScroll);
  }

  private readonly onScroll = (): void => {
    const { scrollTop, scrollHeight, clientHeight } = this.element;
    this.following = scrollHeight - scrollTop - clientHeight < NEAR;
  };
}

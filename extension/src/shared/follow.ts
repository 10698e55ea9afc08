const NEAR = 24;

/** Keeps a scrolling element at its end while text grows, unless the reader scrolled up. */
export class Follow {
  private following = true;

  constructor(private readonly element: HTMLElement) {
    element.addEventListener("scroll", this.onScroll, { passive: true });
  }

  /** Call after the content has grown. */
  grown(): void {
    if (this.following) this.element.scrollTop = this.element.scrollHeight;
  }

  dispose(): void {
    this.element.removeEventListener("scroll", this.onScroll);
  }

  private readonly onScroll = (): void => {
    const { scrollTop, scrollHeight, clientHeight } = this.element;
    this.following = scrollHeight - scrollTop - clientHeight < NEAR;
  };
}

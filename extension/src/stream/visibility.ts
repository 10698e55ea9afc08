const REPORT_AFTER = 100;

/** Tells which rows are on screen: at once when that is first known, then at most every 100 ms and when it has changed. */
export class Visibility {
  private readonly visible = new Set<number>();
  private readonly rows = new Map<Element, number>();
  private readonly observer: IntersectionObserver;
  private timer: number | undefined;
  private known = false;

  constructor(private readonly report: (rows: number[]) => void) {
    this.observer = new IntersectionObserver(this.onChange, { rootMargin: "200px" });
  }

  watch(element: Element, row: number): void {
    this.rows.set(element, row);
    this.observer.observe(element);
  }

  /** Tell it again. Nothing is told before the browser has said what is on screen: "no row" would stop all text. */
  readonly repeat = (): void => {
    window.clearTimeout(this.timer);
    this.timer = undefined;
    if (this.known) this.report([...this.visible].sort((a, b) => a - b));
  };

  dispose(): void {
    this.observer.disconnect();
    window.clearTimeout(this.timer);
  }

  private readonly onChange = (entries: IntersectionObserverEntry[]): void => {
    for (const entry of entries) {
      const row = this.rows.get(entry.target)!;
      if (entry.isIntersecting) this.visible.add(row);
      else this.visible.delete(row);
    }
    if (this.known) this.timer ??= window.setTimeout(this.repeat, REPORT_AFTER);
    else {
      this.known = true;
      this.repeat();
    }
  };
}

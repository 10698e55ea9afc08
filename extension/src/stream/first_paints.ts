/** Tells which rows show their first text: each once, when it has been painted. */
export class FirstPaints {
  private readonly told = new Set<number>();
  private fresh: number[] = [];
  private timer: number | undefined;

  constructor(private readonly tell: (rows: number[]) => void) {}

  /** `row` has text now; what a frame draws is on screen when the tasks after it run. */
  drawn(row: number): void {
    if (this.told.has(row)) return;
    this.told.add(row);
    this.fresh.push(row);
    this.timer ??= window.setTimeout(this.report);
  }

  dispose(): void {
    window.clearTimeout(this.timer);
  }

  private readonly report = (): void => {
    this.timer = undefined;
    this.tell(this.fresh);
    this.fresh = [];
  };
}

/** Keeps count of numbered messages: a snapshot sets the count, a frame must be the next one, a gap asks once. */
export class Sequence {
  private last = -1;
  private asked = false;

  constructor(private readonly ask: (have: number) => void) {}

  snapshot(seq: number): void {
    this.last = seq;
    this.asked = false;
  }

  /** Whether the frame `seq` is to be applied. Frames before the snapshot are old news; after a gap nothing is, until a snapshot came. */
  accepts(seq: number): boolean {
    if (this.asked || seq <= this.last) return false;
    if (seq === this.last + 1) {
      this.last = seq;
      return true;
    }
    this.asked = true;
    this.ask(this.last);
    return false;
  }
}

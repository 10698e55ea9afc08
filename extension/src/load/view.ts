import type { LoadState } from "../model";
import { button, h, setText } from "../shared/dom";
import { seconds } from "../shared/format";

/** A load: a bar of its stages, the newest step in words, and Cancel; when it is over, how it ended. */
export class LoadView {
  readonly element: HTMLElement;
  private model = "";
  private stages: HTMLElement[] = [];
  private readonly title = h("b", "");
  private readonly words = h("span", "llmk-totals", { role: "status" });
  private readonly seconds = h("span", "llmk-number llmk-dim");
  private readonly bar = h("div", "llmk-stages", { role: "progressbar" });
  private readonly cancel: HTMLButtonElement;

  constructor(onCancel: (model: string) => void) {
    this.cancel = button("Cancel", "End this load and its engine process", () => {
      this.cancel.disabled = true;
      onCancel(this.model);
    });
    const line = h("div", "llmk-head", {}, this.title, this.words, this.seconds, this.cancel);
    this.element = h("div", "llmk llmk-load", {}, line, this.bar);
  }

  show(state: LoadState): void {
    const loading = state.state === "loading";
    this.model = state.model;
    this.element.dataset.state = state.state;
    setText(this.title, loading ? state.title : "");
    setText(this.words, state.words);
    setText(this.seconds, state.seconds ? seconds(state.seconds) : "");
    for (const part of [this.title, this.seconds, this.bar, this.cancel]) part.hidden = !loading;
    if (!loading) return;
    this.build(state.stages ?? []);
    this.bar.setAttribute("aria-label", state.title);
    this.bar.setAttribute("aria-valuetext", state.words);
    this.stages.forEach((stage, index) => fill(stage, index - (state.at ?? 0), state.share));
  }

  private build(names: string[]): void {
    if (names.join() === this.stages.map((stage) => stage.textContent).join()) return;
    this.stages = names.map((name) => h("div", "llmk-stage", {}, h("div", "llmk-fill", {}, h("i", "")), name));
    this.bar.replaceChildren(...this.stages);
  }
}

/** place: below 0 the stage is over, at 0 it runs, above 0 it is yet to come. */
function fill(stage: HTMLElement, place: number, share: number | undefined): void {
  const part = stage.querySelector<HTMLElement>("i")!;
  stage.dataset.place = place < 0 ? "over" : place === 0 ? "now" : "later";
  stage.toggleAttribute("data-unknown", place === 0 && share === undefined);
  part.style.width = place < 0 ? "100%" : place === 0 && share !== undefined ? `${share * 100}%` : "";
}

import { afterEach, describe, expect, it } from "vitest";
import load from "../src/load/index";
import type { LoadState, StopUp } from "../src/model";
import { FakeModel } from "./fake_model";

const loading = (more: Partial<LoadState> = {}): LoadState => ({
  model: "m",
  title: "Loading m",
  state: "loading",
  words: "weights 3/12",
  stages: ["process", "importing", "weights", "warm-up"],
  at: 2,
  share: 0.25,
  seconds: 1.2,
  ...more,
});

function open(state: LoadState) {
  const stop = new FakeModel<StopUp>({});
  const traits: Record<string, unknown> = { load: state, stop: "IPY_MODEL_s" };
  const model = new FakeModel<never>(traits, { s: stop });
  const element = document.createElement("div");
  document.body.append(element);
  const cleanUp = load.render({ model: model as never, el: element });
  const show = (next: LoadState): void => {
    traits.load = next;
    model.change("load");
  };
  return { stop, model, element, cleanUp, show };
}

afterEach(() => document.body.replaceChildren());

const stages = (element: HTMLElement) =>
  [...element.querySelectorAll<HTMLElement>(".llmk-stage")].map((stage) => [
    stage.textContent,
    stage.dataset.place,
    stage.querySelector("i")!.style.width,
  ]);

describe("a load", () => {
  it("shows its stages, the step that runs and how far it is", () => {
    const { element, show } = open(loading());
    expect(stages(element)).toEqual([
      ["process", "over", "100%"],
      ["importing", "over", "100%"],
      ["weights", "now", "25%"],
      ["warm-up", "later", ""],
    ]);
    expect(element.textContent).toContain("weights 3/12");
    const bar = element.querySelector("[role=progressbar]")!;
    expect(bar.getAttribute("aria-valuetext")).toBe("weights 3/12");
    show(loading({ at: 3, share: undefined, words: "warm-up" }));
    expect(stages(element)[2]).toEqual(["weights", "over", "100%"]);
    expect(element.querySelector("[data-unknown]")!.textContent).toBe("warm-up");
  });

  it("takes up a stage that not every load has", () => {
    const { element, show } = open(loading());
    show(loading({ stages: ["process", "convert", "importing", "weights", "warm-up"], at: 1 }));
    expect(stages(element).map(([name]) => name)).toEqual(["process", "convert", "importing", "weights", "warm-up"]);
  });

  it("is cancelled once, over the stop channel", async () => {
    const { element, stop } = open(loading());
    await Promise.resolve();
    const cancel = element.querySelector<HTMLButtonElement>('[aria-label="End this load and its engine process"]')!;
    cancel.click();
    cancel.click();
    await new Promise((resolve) => setTimeout(resolve));
    expect(stop.sent).toEqual([{ t: "hello" }, { t: "cancel", model: "m" }]);
  });

  it("tells how it ended, and nothing else", () => {
    const { element, show, model, cleanUp } = open(loading());
    show({ model: "m", title: "Loading m", state: "ready", words: "m is ready (2.1 s)" });
    const shown = [...element.querySelectorAll<HTMLElement>(".llmk-load *")].filter((one) => !one.hidden && !one.closest("[hidden]"));
    expect(shown.map((one) => one.textContent).join("")).toContain("m is ready (2.1 s)");
    expect(element.querySelector("button")!.hidden).toBe(true);
    cleanUp();
    expect(model.listening).toBe(0);
  });
});

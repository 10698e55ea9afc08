import type { LoadTraits } from "../model";
import { StopChannel } from "../shared/stop";
import type { RenderArguments } from "../shared/widget";
import "./style.css";
import { LoadView } from "./view";

/** anywidget's entry: one view of a LoadBar model. Returns its clean-up. */
function render({ model, el }: RenderArguments<LoadTraits, never, never>): () => void {
  const stop = new StopChannel(model.widget_manager, model.get("stop"));
  const view = new LoadView((name) => void stop.cancel(name));
  const show = (): void => view.show(model.get("load"));
  el.replaceChildren(view.element);
  model.on("change:load", show);
  show();
  return () => model.off("change:load", show);
}

export default { render };

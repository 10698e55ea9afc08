import type { DashboardDown, DashboardTraits, DashboardUp } from "../model";
import { StopChannel } from "../shared/stop";
import type { RenderArguments } from "../shared/widget";
import "./style.css";
import { DashboardView } from "./view";

/** anywidget's entry: one view of a Dashboard model. Returns its clean-up. */
function render({ model, el }: RenderArguments<DashboardTraits, DashboardDown, DashboardUp>): () => void {
  const stop = new StopChannel(model.widget_manager, model.get("stop"));
  const view = new DashboardView({ send: (message) => model.send(message), stop: (ids) => void stop.stop(ids) });
  const receive = (message: DashboardDown): void => view.receive(message);
  el.replaceChildren(view.element);
  view.mount();
  model.on("msg:custom", receive);
  model.send({ t: "hello" });
  return () => {
    model.off("msg:custom", receive);
    view.dispose();
  };
}

export default { render };

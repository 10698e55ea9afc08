import type { StreamDown, StreamTraits, StreamUp } from "../model";
import { StopChannel } from "../shared/stop";
import type { RenderArguments } from "../shared/widget";
import "./style.css";
import { StreamView } from "./view";

/** anywidget's entry: one view of a StreamView model. Returns its clean-up. */
function render({ model, el }: RenderArguments<StreamTraits, StreamDown, StreamUp>): () => void {
  const stop = new StopChannel(model.widget_manager, model.get("stop"));
  const view = new StreamView({
    send: (message) => model.send(message),
    stop: (ids) => void stop.stop(ids),
    logprobs: model.get("logprobs"),
  });
  const receive = (message: StreamDown): void => view.receive(message);
  el.replaceChildren(view.element);
  model.on("msg:custom", receive);
  const ended = model.get("snapshot");
  if (ended) view.receive(ended);
  model.send({ t: "hello" });
  return () => {
    model.off("msg:custom", receive);
    view.dispose();
  };
}

export default { render };

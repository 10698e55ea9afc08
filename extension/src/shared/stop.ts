import type { StopUp } from "../model";
import { resolveModel } from "./widget";

interface StopModel {
  send(message: StopUp): void;
}

/**
 * The way of a click on Stop or Cancel to the kernel: a comm of its own, so that it is heard while a cell blocks the main thread.
 * It says hello at once: the kernel answers from inside its handler, which is what moves the comm off the main thread.
 */
export class StopChannel {
  private readonly ready: Promise<StopModel>;

  constructor(manager: { get_model(id: string): Promise<unknown> }, reference: string) {
    this.ready = resolveModel<StopModel>(manager, reference);
    this.ready.then(
      (model) => model.send({ t: "hello" }),
      () => undefined, // the kernel that owned it is gone: nothing is left to stop
    );
  }

  async stop(ids: string[]): Promise<void> {
    if (ids.length > 0) (await this.ready).send({ t: "stop", ids });
  }

  async cancel(model: string): Promise<void> {
    (await this.ready).send({ t: "cancel", model });
  }
}

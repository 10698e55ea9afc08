/** The part of anywidget's interface that these widgets use. */
export interface WidgetModel<Traits, Down, Up> {
  get<K extends keyof Traits & string>(name: K): Traits[K];
  on(event: "msg:custom", callback: (message: Down) => void): void;
  on(event: `change:${keyof Traits & string}`, callback: () => void): void;
  off(event: string, callback: unknown): void;
  send(message: Up): void;
  widget_manager: { get_model(id: string): Promise<unknown> };
}

export interface RenderArguments<Traits, Down, Up> {
  model: WidgetModel<Traits, Down, Up>;
  el: HTMLElement;
}

const REFERENCE = "IPY_MODEL_";

/** The model that a reference trait ("IPY_MODEL_<id>") names. */
export async function resolveModel<M>(
  manager: { get_model(id: string): Promise<unknown> },
  reference: string,
): Promise<M> {
  const id = reference.startsWith(REFERENCE) ? reference.slice(REFERENCE.length) : reference;
  return (await manager.get_model(id)) as M;
}

/** A widget model without a kernel: what was sent is kept, what the kernel would say is pushed in by the test. */
export class FakeModel<Up> {
  readonly sent: Up[] = [];
  private readonly listeners = new Map<string, Set<(message: never) => void>>();
  readonly widget_manager: { get_model(id: string): Promise<unknown> };

  constructor(
    private readonly traits: Record<string, unknown>,
    models: Record<string, unknown> = {},
  ) {
    this.widget_manager = { get_model: async (id) => models[id] };
  }

  get(name: string): never {
    return this.traits[name] as never;
  }

  on(event: string, callback: (message: never) => void): void {
    const set = this.listeners.get(event) ?? new Set();
    this.listeners.set(event, set.add(callback));
  }

  off(event: string, callback: unknown): void {
    this.listeners.get(event)?.delete(callback as (message: never) => void);
  }

  send(message: Up): void {
    this.sent.push(message);
  }

  say(message: unknown): void {
    for (const listener of this.listeners.get("msg:custom") ?? []) listener(message as never);
  }

  /** The trait has changed. */
  change(name: string): void {
    for (const listener of this.listeners.get(`change:${name}`) ?? []) (listener as () => void)();
  }

  get listening(): number {
    return [...this.listeners.values()].reduce((sum, set) => sum + set.size, 0);
  }
}

// jsdom has no layout: observers that never fire stand in for the browser's.
class NoObserver {
  observe(): void {}
  disconnect(): void {}
}
Object.assign(globalThis, { IntersectionObserver: NoObserver, ResizeObserver: NoObserver });

import type { Part, Want } from "../model";

export interface MarkdownPart {
  renderMarkdown(element: HTMLElement, text: string): void;
}

/** Widgets are modules of their own; what one has fetched serves all on the page. */
const page = globalThis as { llmkernelMarkdown?: Promise<MarkdownPart> };

/** Fetches parts of this program from the kernel when they are first needed, so that most cells never carry them. */
export class Parts {
  private answer: ((source: string) => void) | undefined;

  constructor(private readonly ask: (want: Want) => void) {}

  markdown(): Promise<MarkdownPart> {
    page.llmkernelMarkdown ??= this.fetch();
    return page.llmkernelMarkdown;
  }

  receive(part: Part): void {
    this.answer?.(part.source);
  }

  /** Who asked is gone, and nothing came: the next one asks again. */
  dispose(): void {
    if (this.answer) page.llmkernelMarkdown = undefined;
  }

  private async fetch(): Promise<MarkdownPart> {
    const source = await new Promise<string>((resolve) => {
      this.answer = resolve;
      this.ask({ t: "want", part: "markdown" });
    });
    this.answer = undefined;
    const url = URL.createObjectURL(new Blob([source], { type: "text/javascript" }));
    try {
      return (await import(/* @vite-ignore */ url)) as MarkdownPart;
    } finally {
      URL.revokeObjectURL(url);
    }
  }
}

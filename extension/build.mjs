// Builds one ES module and one style sheet per widget into llmkernel/notebook/static/. `--watch` rebuilds on change.
import { context } from "esbuild";

const outdir = process.env.LLMKERNEL_STATIC ?? "../llmkernel/notebook/static";
const build = await context({
  entryPoints: {
    stream: "src/stream/index.ts",
    markdown: "src/stream/markdown.ts",
    dashboard: "src/dashboard/index.ts",
    load: "src/load/index.ts",
  },
  bundle: true,
  format: "esm",
  target: "es2022",
  minify: true,
  legalComments: "none",
  charset: "utf8",
  outdir,
  logLevel: "info",
});
if (process.argv.includes("--watch")) {
  await build.watch();
} else {
  await build.rebuild();
  await build.dispose();
}

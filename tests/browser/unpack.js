// Run by `npm run unpack` after `npm ci`: unpacks Chromium, its libraries and its font into node_modules/.chromium.
// The package unpacks into the directory for temporary files, and its libraries only where it sees a Lambda machine.
"use strict";

const fs = require("node:fs");
const path = require("node:path");

const directory = path.join(__dirname, "node_modules", ".chromium");
fs.rmSync(directory, { recursive: true, force: true });
fs.mkdirSync(directory);
process.env.TMPDIR = directory;
process.env.AWS_EXECUTION_ENV = "AWS_Lambda_nodejs20.x";

const chromium = require("@sparticuz/chromium");
chromium.executablePath().catch((error) => {
  console.error(error.message);
  process.exit(1);
});

// Run by `npm run lock`, here and in tests/browser/, after npm has written package-lock.json: takes out the "funding"
// keys, for which npm has no switch, because committed files name no hosts. `npm ci` accepts the result.
"use strict";

const fs = require("node:fs");
const path = require("node:path");

const file = path.join(process.cwd(), "package-lock.json");
const lock = JSON.parse(fs.readFileSync(file, "utf8"), (key, value) => (key === "funding" ? undefined : value));
fs.writeFileSync(file, `${JSON.stringify(lock, null, 2)}\n`);

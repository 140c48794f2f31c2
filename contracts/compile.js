// Compiles every .sol file beside this one; prints {"<Contract>": {"abi": […], "bytecode": "0x…"}} to stdout.
"use strict";

const fs = require("node:fs");
const path = require("node:path");
const solc = require("solc");

const names = fs.readdirSync(__dirname).filter((name) => name.endsWith(".sol")).sort();
const sources = Object.fromEntries(
  names.map((name) => [name, { content: fs.readFileSync(path.join(__dirname, name), "utf8") }]),
);
const settings = {
  evmVersion: "cancun",
  optimizer: { enabled: true, runs: 200 },
  outputSelection: { "*": { "*": ["abi", "evm.bytecode.object"] } },
};
const output = JSON.parse(solc.compile(JSON.stringify({ language: "Solidity", sources, settings })));

if (output.errors?.length) {
  console.error(output.errors.map((error) => error.formattedMessage).join("\n"));
  process.exit(1);
}
const compiled = {};
for (const name of names) {
  for (const [contract, { abi, evm }] of Object.entries(output.contracts[name])) {
    compiled[contract] = { abi, bytecode: `0x${evm.bytecode.object}` };
  }
}
console.log(JSON.stringify(compiled));

// Verifies deliveries with the reference library of Standard Webhooks, and by the plain header. Reads from stdin a JSON
// list of {"secret", "headers", "body" (base64), "plainHeader"}; prints one of {"standard": bool, "plain": bool}.
"use strict";

const { createHmac } = require("node:crypto");
const fs = require("node:fs");
const { Webhook, WebhookVerificationError } = require("standardwebhooks");

const standard = ({ secret, headers, body }) => {
  try {
    new Webhook(secret).verify(Buffer.from(body, "base64"), headers);
    return true;
  } catch (error) {
    if (error instanceof WebhookVerificationError) return false;
    throw error;
  }
};
const plain = ({ secret, headers, body, plainHeader }) =>
  headers[plainHeader] === createHmac("sha256", secret).update(Buffer.from(body, "base64")).digest("hex");

const received = JSON.parse(fs.readFileSync(0, "utf8"));
console.log(JSON.stringify(received.map((one) => ({ standard: standard(one), plain: plain(one) }))));

"""The execution layer: JSON-RPC, and the proofs of what nodes return."""

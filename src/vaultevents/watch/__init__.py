"""Read the chains and commit events: sources read spans, `advance()` commits them."""

"""The operator's console: pages that are rendered on the server, on a listener of their own."""

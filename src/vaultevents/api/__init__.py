"""HTTP for customers: authenticated requests that read, and that change webhooks."""

"""What `check` tries: one probe for each subject that is configured, none of which depends on another."""

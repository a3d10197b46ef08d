"""Generate the parts of the documentation that are derived from schema, rules and code."""

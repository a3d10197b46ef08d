"""Write the parts of the documentation that follow from schema, rules and code."""

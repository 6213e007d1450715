"""Rules that derive findings from a record, one file for each family of findings."""

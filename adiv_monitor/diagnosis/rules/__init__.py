"""What rules look for in a record, a file for each family of findings."""

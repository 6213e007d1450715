"""What an audit is told: the options of the command, and how wrong ones are refused."""

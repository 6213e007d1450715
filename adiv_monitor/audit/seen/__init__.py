"""What is seen of a run: one fork, trained under a monitor, and looked at before and after."""

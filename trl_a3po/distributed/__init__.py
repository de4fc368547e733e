"""Several processes, one run: who decides, who gets which rows, what happens when one of them fails."""

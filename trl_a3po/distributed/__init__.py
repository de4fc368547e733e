"""One run in several processes: which of them decides, which rows each trains on, and what happens when one fails."""

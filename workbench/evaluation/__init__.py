"""lm-eval against a live endpoint: tasks, the harness process, its files, and the scores read from them."""

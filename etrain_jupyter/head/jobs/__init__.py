"""One job inside the coordinator: its state machine, its log, and its reports."""

"""What keeps a training run going: a watchdog of rules and actions."""

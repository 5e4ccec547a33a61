"""Plan a training step for absent hardware by compiling it, and report its memory, time and traffic."""

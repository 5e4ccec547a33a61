"""gpt-oss: attention with sinks, experts with clamped gates, experiments, and a family in Hugging Face format."""

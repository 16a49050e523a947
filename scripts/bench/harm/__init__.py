"""What scripts/bench/no_harm runs and how it judges: programs beside their own allocators' best settings."""

"""Plans put together from stages that are known."""

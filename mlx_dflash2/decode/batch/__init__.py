"""What several sequences at once need beyond one."""

"""Pure: from a profile and a policy to what is kept, what is computed again, and what that costs."""

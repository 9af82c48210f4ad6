"""Policy rules, one file each, and the policies that combine or bound others."""

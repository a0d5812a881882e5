"""Generated from proto/ by scripts/gen-python.sh. Private: it may change in any release."""

# Consul's agent as kvgate's nodes need it: every healthy gateway in one answer, and an answer that was cut says so.
# What belongs to a machine comes by flags; docs/DNS.md has the command.

dns_config {
  # A service whose check has the state "warning" is left out, too.
  only_passing = true

  # Without it Consul cuts an answer to what UDP holds and does not say so, and a client takes the rest for all.
  enable_truncate = true

  # Consul's default is 0: resolvers would keep nothing, and ask for each request.
  service_ttl = {
    "*" = "2s"
  }
}

performance {
  # A new leader within seconds. Consul's default is for machines smaller than a storage node.
  raft_multiplier = 1
}

disable_update_check = true

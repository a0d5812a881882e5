//go:build !sabotage_tenants

package engine

// clientsAreTenants: the host is shared between clients first, and between the trees of each then. The build tag sabotage_tenants breaks this on
// purpose (scripts/sabotage.sh).
const clientsAreTenants = true

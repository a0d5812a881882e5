//go:build !sabotage_trust

package service

// asksWhoTrusts: that the dumps of an archive are to be trusted is for root to say, or an account that may. The build tag
// sabotage_trust breaks this on purpose; TestAccountsHoldWhicheverWay must then fail.
const asksWhoTrusts = true

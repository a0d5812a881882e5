//go:build !sabotage_answers

package tree

// answersWait: a refusal is given when all that it may rest on is durable. The build tag sabotage_answers breaks
// this on purpose; TestAnswersRestOnWhatIsDurable must then fail.
const answersWait = true

_chakra_et() {
    local word=${COMP_WORDS[COMP_CWORD]} command=${COMP_WORDS[1]} words=
    if [ "$COMP_CWORD" = 1 ]; then
        words="@COMMANDS@ --help --version"
    else
        case "$command ${COMP_WORDS[COMP_CWORD - 1]}" in
@CHOICES@
        esac
        case "$command $word" in
@FLAGS@
        esac
    fi
    COMPREPLY=()
    while IFS= read -r word; do COMPREPLY+=("$word"); done < <(compgen -W "$words" -- "$word")
}
complete -o default -F _chakra_et chakra-et

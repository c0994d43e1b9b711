{{- define "kvgate.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "kvgate.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else if contains (include "kvgate.name" .) .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "kvgate.name" .) | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "kvgate.selector" -}}
app.kubernetes.io/name: {{ include "kvgate.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "kvgate.labels" -}}
{{ include "kvgate.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "kvgate.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "kvgate.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "kvgate.image" -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}
{{- end -}}

{{/* The daemon's configuration: what the values say, and what follows from the other values. */}}
{{- define "kvgate.config" -}}
{{- $config := deepCopy .Values.config -}}
{{- range $section := list "s3" "arena" "api" -}}
{{- if not (get $config $section) -}}{{- $_ := set $config $section dict -}}{{- end -}}
{{- end -}}
{{- if .Values.hugePages -}}
{{- $_ := set $config.arena "huge_pages" true -}}
{{- if not (hasPrefix "/dev/hugepages/" (default "" $config.arena.path)) -}}
{{- $_ := set $config.arena "path" "/dev/hugepages/kvgate/arena" -}}
{{- end -}}
{{- end -}}
{{- if .Values.caConfigMap -}}{{- $_ := set $config.s3 "ca_file" "/etc/kvgate/ca/ca.crt" -}}{{- end -}}
{{- if not $config.api.token_file -}}{{- $_ := set $config.api "token_file" "/etc/kvgate/token/token" -}}{{- end -}}
{{- if and (eq .Values.mode "daemonset") (not $config.api.hosts) -}}
{{- $name := include "kvgate.fullname" . -}}
{{- $at := printf "%s.%s" $name .Release.Namespace -}}
{{- $_ := set $config.api "hosts" (printf "%s,%s,%s.svc,%s.svc.cluster.local" $name $at $at $at) -}}
{{- end -}}
{{- if and .Values.peersSecret (eq .Values.mode "daemonset") -}}
{{- $members := printf "%s.%s.svc:%s" (include "kvgate.fullname" .) .Release.Namespace (include "kvgate.peersPort" .) -}}
{{- $ours := dict "members" $members "token_file" "/etc/kvgate/peers/token" -}}
{{- $_ := set $config "peers" (mergeOverwrite $ours (default dict $config.peers)) -}}
{{- end -}}
{{- toYaml $config -}}
{{- end -}}

{{/* The port where gateways ask each other. */}}
{{- define "kvgate.peersPort" -}}
{{- $peers := default dict .Values.config.peers -}}
{{- regexFind "[0-9]+$" (default "0.0.0.0:9181" $peers.listen) -}}
{{- end -}}

{{/* Bytes of a size such as 64GiB. */}}
{{- define "kvgate.bytes" -}}
{{- $text := kindIs "string" .value | ternary .value (printf "%d" (int64 .value)) -}}
{{- $units := dict "B" 1 "KiB" 1024 "MiB" 1048576 "GiB" 1073741824 "TiB" 1099511627776 -}}
{{- if not (regexMatch "^[0-9]+ ?(B|KiB|MiB|GiB|TiB)?$" $text) -}}
{{- fail (printf "%s is %q: write a whole number with its unit, such as 64GiB" .key $text) -}}
{{- end -}}
{{- mul (regexFind "^[0-9]+" $text | int64) (get $units (default "B" (regexFind "[A-Za-z]+$" $text)) | int64) -}}
{{- end -}}

{{/* Whole seconds of a duration such as 1m30s, rounded up. */}}
{{- define "kvgate.seconds" -}}
{{- $text := kindIs "string" .value | ternary .value (printf "%ds" (int64 .value)) -}}
{{- if regexMatch "^[0-9]+$" $text -}}{{- $text = printf "%ss" $text -}}{{- end -}}
{{- if not (regexMatch "^([0-9]+ ?(ms|s|m|h) ?)+$" $text) -}}
{{- fail (printf "%s is %q: write whole numbers with their units, such as 90s" .key $text) -}}
{{- end -}}
{{- $units := dict "s" 1000 "m" 60000 "h" 3600000 "ms" 1 -}}
{{- $sum := 0 -}}
{{- range regexFindAll "[0-9]+ ?(ms|s|m|h)" $text -1 -}}
{{- $sum = add $sum (mul (regexFind "^[0-9]+" . | int64) (get $units (regexFind "[a-z]+$" .) | int64)) -}}
{{- end -}}
{{- div (add $sum 999) 1000 -}}
{{- end -}}

{{/* The port of config.api.listen. */}}
{{- define "kvgate.port" -}}
{{- $listen := default "" .Values.config.api.listen -}}
{{- if not (regexMatch ":[0-9]+$" $listen) -}}
{{- fail "config.api.listen is not set: probes and metrics need it, such as 0.0.0.0:9180" -}}
{{- end -}}
{{- regexFind "[0-9]+$" $listen -}}
{{- end -}}

{{/* The port of config.s3.endpoint. Empty without an endpoint. */}}
{{- define "kvgate.s3Port" -}}
{{- $endpoint := default "" .Values.config.s3.endpoint -}}
{{- if $endpoint -}}
{{- $url := urlParse $endpoint -}}
{{- regexFind "[0-9]+$" (regexFind ":[0-9]+$" $url.host) | default (ternary "443" "80" (eq $url.scheme "https")) -}}
{{- end -}}
{{- end -}}

{{/* The node's folders that the gateway's container mounts: name, path on the node, path in the container. */}}
{{- define "kvgate.folders" -}}
{{- $config := include "kvgate.config" . | fromYaml -}}
{{- $shared := dir $config.api.socket -}}
{{- $folders := list (dict "name" "shared" "host" .Values.sharedFolder "at" $shared "type" "DirectoryOrCreate") -}}
{{- $arena := dir (required "config.arena.path is not set: engines map the arena by its path" $config.arena.path) -}}
{{- if ne $arena $shared -}}
{{- $folders = append $folders (dict "name" "arena" "host" $arena "at" $arena "type" "DirectoryOrCreate") -}}
{{- end -}}
{{- if $config.disk -}}
{{- range $i, $path := splitList "," (default "" $config.disk.paths) | compact -}}
{{- $path = trim $path -}}
{{- $folders = append $folders (dict "name" (printf "disk-%d" $i) "host" $path "at" $path "type" "Directory") -}}
{{- end -}}
{{- end -}}
{{- $system := list "/" "/bin" "/boot" "/dev" "/dev/hugepages" "/dev/shm" "/etc" "/home" "/lib" "/media" "/mnt" "/opt" "/proc" "/root" "/run" "/sbin" "/srv" "/sys" "/tmp" "/usr" "/var" "/var/lib" "/var/run" "/var/tmp" -}}
{{- range $folders -}}
{{- range list (clean .host) (clean .at) -}}
{{- if has . $system -}}
{{- fail (printf "%s is for the whole node, and the gateway would take it for itself: name a folder in it, such as %s/kvgate" . (trimSuffix "/" .)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- dict "folders" $folders | toJson -}}
{{- end -}}
